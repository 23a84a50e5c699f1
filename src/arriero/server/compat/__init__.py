"""OpenAI's and Anthropic's APIs ⇄ our neutral types: what their routes share, their conversions and their writers."""
