"""Methods that act on routing itself: loss-free bias and training noise."""
