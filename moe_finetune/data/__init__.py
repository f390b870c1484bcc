"""From sources (files, folders, the hub) to tokenised examples."""
