"""What a change of batch, learning rate or numerics does to the loss."""
