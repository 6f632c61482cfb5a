"""What searches have found: the fastest configuration of each class of problems, on each GPU."""
