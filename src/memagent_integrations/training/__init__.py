"""Teaching a model to keep in its memory what a question will need."""
