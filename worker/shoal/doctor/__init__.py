"""What `shoal doctor` looks at on the training side. torch is imported by the checks that need it, nowhere else."""
