"""What a person sees: tables and progress in the terminal, figures."""
