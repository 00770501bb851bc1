"""Training: prompts -> the target's own replies with its states -> drafter -> evaluation."""
