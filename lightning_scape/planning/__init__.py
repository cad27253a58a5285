"""What a step costs, computed and measured."""
