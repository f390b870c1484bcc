"""Paper 4's own experiments at their real size: subset recovery and diverse experts."""
