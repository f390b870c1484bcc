"""ms-swift's plugin, in a folder of its own: ms-swift puts a plugin's folder on ``sys.path``."""
