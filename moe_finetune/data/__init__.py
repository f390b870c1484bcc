"""From sources (files, folders, the hub) to tokenized examples."""
