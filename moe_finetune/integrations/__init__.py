"""The method inside other people's trainers: one file for each host, imported by that host only."""
