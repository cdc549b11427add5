"""What every process of a job knows: its settings, its terms, the messages that there are, and how tensors travel in them."""
