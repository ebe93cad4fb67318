"""Parts of an ``ExportRecipe``, and faster versions of ExecuTorch's stages for this package's ``export``."""
