"""What runs in a cell, next to the candidate: its launches are recorded, none happens."""
