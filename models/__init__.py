"""Models, written the way a user would write their own. A config names its model as `module:Class`."""
