"""What training measures: routing, the share of each loss, sampled tokens."""
