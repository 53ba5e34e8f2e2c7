"""Run by Alembic before the migrations: gives it the connection that the upgrade came with."""

from alembic import context

from flashgen.database import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
