"""What is inside the contributions of a simulated job: nothing, norms by a law, or the gradients of a real model."""
