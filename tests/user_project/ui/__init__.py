TITLE = "the user's own"
