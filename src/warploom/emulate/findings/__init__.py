"""What was found: findings and their causes, the words of the messages, and what was counted."""
