"""Pictures and pages: reads finished runs, draws them, and makes no load."""
