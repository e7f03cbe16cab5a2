"""OpenAI's dialect: the JSON that is read and written, and the document that describes it."""
