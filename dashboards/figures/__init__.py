"""Pictures: numbers in, a figure for Plotly out. No file is read here, and no clock."""
