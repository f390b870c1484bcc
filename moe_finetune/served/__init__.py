"""Is what a server answers the model that was trained?

``prompts`` chooses token ids, ``client`` asks the server for their log-probabilities, ``reference``
computes them with transformers, ``rendering`` compares chat templates, ``verdict`` judges the
differences, and ``check`` joins these to one result.
"""
