"""What spindel costs, question by question; see `README.md` beside this file."""
