"""From measurements to a language model that forecasts them: data, losses, rewards, training, export."""
