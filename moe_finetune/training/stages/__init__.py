"""What the stage of reinforcement learning adds: its trainer, rollouts, rewards."""
