"""What all precisions smaller than float32 have in common, and the choice among them."""
