"""How a database of an older flashgen becomes one of today's; the only place that uses Alembic.

A change of the tables needs three things: the new tables in schema.py, a file in versions/ with the next number as its revision,
and that number at the end of schema.REVISIONS. A test holds the migrated tables against schema.py.
"""

from pathlib import Path

from sqlalchemy import Connection

FOLDER = Path(__file__).parent


def upgrade(connection: Connection) -> None:
    """Bring the tables to the newest revision, inside the connection's transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
