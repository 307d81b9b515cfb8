"""What a language model's answers are worth: collected on recorded problems, and fitted."""
