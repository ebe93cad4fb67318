"""Parts of an ``ExportRecipe``, and faster stages for our own ``export``."""
