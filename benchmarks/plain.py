"""One line of Flask: what a view costs that checks nothing."""

from flask import Flask

app = Flask(__name__)


@app.get("/api/v1/protected/test")
def test() -> dict[str, object]:
    return {"success": True, "message": "Your API key is valid."}
