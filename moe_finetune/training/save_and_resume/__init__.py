"""What a run saves: training states that resume to the bit, adapters, whole models."""
