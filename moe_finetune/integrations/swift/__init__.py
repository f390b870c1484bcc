"""ms-swift's plugin, in a separate folder because ms-swift adds it to ``sys.path``."""
