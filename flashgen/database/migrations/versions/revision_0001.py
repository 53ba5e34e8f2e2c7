"""The first tables: records and meta."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "records",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("format", sa.Integer, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("origin", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("median_us", sa.Float),
        sa.Column("problem_key", sa.String(64), nullable=False),
        sa.Column("direction", sa.String, nullable=False),
        sa.Column("batch", sa.Integer, nullable=False),
        sa.Column("heads_q", sa.Integer, nullable=False),
        sa.Column("heads_kv", sa.Integer, nullable=False),
        sa.Column("seqlen_q", sa.Integer, nullable=False),
        sa.Column("seqlen_kv", sa.Integer, nullable=False),
        sa.Column("head_dim_qk", sa.Integer, nullable=False),
        sa.Column("head_dim_v", sa.Integer, nullable=False),
        sa.Column("dtype", sa.String, nullable=False),
        sa.Column("mask", sa.String, nullable=False),
        sa.Column("device_key", sa.String, nullable=False),
        sa.Column("arch", sa.String, nullable=False),
        sa.Column("variant", sa.String),
        sa.Column("config", sa.String),
        sa.Column("candidate_key", sa.String(64)),
        sa.Column("peer", sa.String),
        sa.Column("source_sha256", sa.String, nullable=False),
        sa.Column("registers", sa.Integer),
        sa.Column("smem_bytes", sa.Integer),
        sa.Column("triton", sa.String, nullable=False),
        sa.Column("utc", sa.String, nullable=False),
    )
    op.create_index("records_by_problem", "records", ["problem_key", "device_key", "status"])
    op.create_index("records_by_device", "records", ["direction", "arch", "device_key", "status"])
    op.create_index("records_by_status", "records", ["status", "utc"])
    op.create_table("meta", sa.Column("name", sa.String, primary_key=True), sa.Column("value", sa.Text, nullable=False))


def downgrade() -> None:
    op.drop_table("meta")
    op.drop_table("records")
