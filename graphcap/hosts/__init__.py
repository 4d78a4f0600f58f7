"""Inference engines that graphcap plugs into. The only place that imports one, and lazily."""
