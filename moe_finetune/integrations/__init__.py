"""The method inside other programs' trainers: one file per program, imported only by it."""
