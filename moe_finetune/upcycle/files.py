"""Names of the files in an upcycle's folders."""

RECIPE_FILE, RESULTS_FILE, TABLES_FILE = "recipe.yaml", "results.json", "tables.md"
TABLE_FILE, CLUSTERS_FILE, MEASURED_FILE = "table.safetensors", "clusters.json", "measured.json"
CURVES = "curves"
REMEDY = "delete its folder and run the stage again"
