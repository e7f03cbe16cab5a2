"""The sections of a page, each as data: a title, what it shows, and its figures and tables or the
reason why there are none."""
