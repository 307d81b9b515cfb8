"""What a search does next, decided from what is known and nothing else."""
