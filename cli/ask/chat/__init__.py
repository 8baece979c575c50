"""`penstock chat`: a conversation in the terminal, through the queue."""
