"""What a call folds: its arguments, its outputs and the program that they make."""
