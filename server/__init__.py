"""HTTP and text: the only package that knows fastapi, pydantic, jinja2, tokenizers or asyncio."""
