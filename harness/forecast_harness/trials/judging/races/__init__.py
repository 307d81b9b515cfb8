"""How solutions are timed beside each other: rules, rounds that drop the slow, races held until they are wanted."""
