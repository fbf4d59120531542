"""teams: projects, mirrors and tokens may belong to a part of an organisation; what is there belongs to the team Default"""

import sqlalchemy as sa
from alembic import op

revision = "0015.2"
down_revision = "0015.1"

# As PostgreSQL has named what 0015.1 made, and as SQLite's, which has no name, is called here.
_UNIQUE = {"uq": "%(table_name)s_%(column_0_N_name)s_key"}
_OF_ALL = "projects_organisation_name_key"


def upgrade() -> None:
    op.create_table(
        "teams",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("organisation", sa.String(length=256), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("organisation", "name"),
    )
    op.add_column("tokens", sa.Column("team", sa.String(length=128), nullable=True))
    # What the version before writes beside this one is of the team Default, as all that it wrote is.
    for table in ("mirrors", "projects"):
        default = sa.text("'Default'")
        op.add_column(table, sa.Column("team", sa.String(length=128), server_default=default, nullable=False))
    connection = op.get_bind()
    if connection.dialect.name != "sqlite":
        op.drop_constraint(_OF_ALL, "projects", type_="unique")
        op.create_unique_constraint(None, "projects", ["organisation", "team", "name"])
        return
    # SQLite makes the table anew, and drops none that another one refers to.
    op.execute("CREATE TEMPORARY TABLE held AS SELECT * FROM checkpoints")
    op.execute("DELETE FROM checkpoints")
    with op.batch_alter_table("projects", naming_convention=_UNIQUE) as batch:
        batch.drop_constraint(_OF_ALL, type_="unique")
        batch.create_unique_constraint("projects_organisation_team_name_key", ["organisation", "team", "name"])
    op.execute("INSERT INTO checkpoints SELECT * FROM held")
    op.execute("DROP TABLE held")
