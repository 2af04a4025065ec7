"""What a run file may say: the model of each section, and the errors about them."""
