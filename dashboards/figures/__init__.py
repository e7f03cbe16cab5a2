"""Pictures: numbers in, a figure as Plotly draws it out. No file is read here, and no clock."""
