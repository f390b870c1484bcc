"""Table and pictures of the strength study."""
def write_strength(study, results, output):
    return ""
