-- Rooms, Runs and causes, before families had an evidence of their own.
--
-- The rules of a row stand here and not in Python, so that no other program and no bug of ours walks around them:
-- whoever writes to these tables meets the same triggers. Each refusal is one of a closed set of codes; it is raised
-- with an SQLSTATE of our own, SPNDL, and stands in the error's field for a constraint's name.
--
-- Everything lies in a schema of its own, and is named with it, so that a database can be shared with other programs
-- and no search path leads elsewhere. Times are UTC microseconds. JSON is kept as text: it is compared and hashed as it
-- was written, which jsonb forgets, and jsonb has no place for \u0000.
--
-- Transactions really overlap here. What a trigger relies on, it locks: the room, the parent, the consumer.

CREATE SCHEMA spindel;

CREATE TABLE spindel.migrations (
  part text COLLATE "C" NOT NULL,
  number integer NOT NULL,
  checksum text NOT NULL,
  at bigint NOT NULL,
  PRIMARY KEY (part, number)
);

CREATE TABLE spindel.rooms (
  name text COLLATE "C" NOT NULL PRIMARY KEY,
  incarnation uuid NOT NULL,
  epoch bigint NOT NULL,
  owner text CHECK (owner IS NULL OR owner::json IS NOT NULL),
  opened_at bigint NOT NULL,
  closed_at bigint
);

CREATE TABLE spindel.runs (
  -- Identity: never changes.
  id uuid NOT NULL PRIMARY KEY,
  room text COLLATE "C" NOT NULL REFERENCES spindel.rooms (name),
  incarnation uuid NOT NULL,
  kind text NOT NULL,
  actor text NOT NULL,
  parent_id uuid REFERENCES spindel.runs (id),
  trigger_id uuid,
  provenance text NOT NULL CHECK (provenance::json IS NOT NULL),
  job_version bigint,
  job_key text,
  job_offer uuid,
  job_experiment uuid,
  created_at bigint NOT NULL,
  started_at bigint NOT NULL,
  -- Outcome: written once.
  status text COLLATE "C" NOT NULL CHECK (status IN ('running', 'waiting', 'completed', 'failed', 'cancelled')),
  reason text COLLATE "C" CHECK (reason IS NULL OR reason ~ '^[a-z0-9-]{1,64}$'),
  error text CHECK (error IS NULL OR char_length(error) <= 2000),
  ended_at bigint,
  job_result_state text,
  job_scorecard uuid,
  updated_at bigint NOT NULL,
  CHECK ((ended_at IS NOT NULL) = (status IN ('completed', 'failed', 'cancelled')))
);

CREATE INDEX runs_by_start ON spindel.runs (room, started_at DESC, id DESC);
CREATE INDEX runs_by_parent ON spindel.runs (parent_id, started_at DESC, id DESC);
-- Adoption reads this one only, so a long history costs an opening nothing.
CREATE INDEX runs_running ON spindel.runs (room, incarnation) WHERE status = 'running';

CREATE TABLE spindel.run_causes (
  run_id uuid NOT NULL REFERENCES spindel.runs (id),
  cause_id uuid NOT NULL REFERENCES spindel.runs (id),
  PRIMARY KEY (run_id, cause_id)
);

CREATE FUNCTION spindel.refuse(code text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = 'SPNDL', CONSTRAINT = code, MESSAGE = 'spindel refuses this: ' || code;
END;
$$;

-- For triggers whose condition says all: the code is their argument.
CREATE FUNCTION spindel.refuse_row() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM spindel.refuse(TG_ARGV[0]);
  RETURN NULL;
END;
$$;

CREATE FUNCTION spindel.runs_insert() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  known text;
  parent record;
BEGIN
  SELECT status INTO known FROM spindel.runs WHERE id = NEW.id;
  IF FOUND THEN
    PERFORM spindel.refuse(CASE WHEN known = 'running' THEN 'run-exists' ELSE 'terminal-fence' END);
  END IF;
  -- Whoever claims the room waits until this transaction is over, and the other way round.
  PERFORM 1 FROM spindel.rooms WHERE name = NEW.room AND incarnation = NEW.incarnation FOR SHARE;
  IF NOT FOUND THEN
    PERFORM spindel.refuse('not-owner');
  END IF;
  IF NEW.parent_id IS NOT NULL THEN
    -- As above, with whoever ends the parent. Asked by its id alone: by more, the planner would take the index of
    -- running rows, which has nothing but those of one room.
    SELECT room, incarnation, status INTO parent FROM spindel.runs WHERE id = NEW.parent_id FOR SHARE;
    IF NOT FOUND OR (parent.room, parent.incarnation, parent.status) <> (NEW.room, NEW.incarnation, 'running') THEN
      PERFORM spindel.refuse('parent-not-live');
    END IF;
  END IF;
  IF (NEW.status = 'running' AND NEW.reason IS NULL AND NEW.error IS NULL)
    OR (NEW.status = 'failed' AND NEW.reason IS NOT DISTINCT FROM 'admission-failed')
  THEN
    IF NEW.job_result_state IS NOT NULL OR NEW.job_scorecard IS NOT NULL THEN
      PERFORM spindel.refuse('witness-at-admission');
    END IF;
  ELSE
    PERFORM spindel.refuse('initial-status');
  END IF;
  RETURN NEW;
END;
$$;

-- A trigger before the insert also meets ON CONFLICT, which goes around a trigger on update, and COPY.
CREATE TRIGGER runs_insert BEFORE INSERT ON spindel.runs FOR EACH ROW EXECUTE FUNCTION spindel.runs_insert();

-- Triggers fire in the order of their names; a condition that doesn't hold costs no call.
CREATE TRIGGER runs_update_1_identity BEFORE UPDATE ON spindel.runs FOR EACH ROW
WHEN (
  (
    OLD.id, OLD.room, OLD.incarnation, OLD.kind, OLD.actor, OLD.parent_id, OLD.trigger_id, OLD.provenance,
    OLD.job_version, OLD.job_key, OLD.job_offer, OLD.job_experiment, OLD.created_at, OLD.started_at
  ) IS DISTINCT FROM (
    NEW.id, NEW.room, NEW.incarnation, NEW.kind, NEW.actor, NEW.parent_id, NEW.trigger_id, NEW.provenance,
    NEW.job_version, NEW.job_key, NEW.job_offer, NEW.job_experiment, NEW.created_at, NEW.started_at
  )
)
EXECUTE FUNCTION spindel.refuse_row('identity-immutable');

CREATE TRIGGER runs_update_2_fence BEFORE UPDATE ON spindel.runs FOR EACH ROW
WHEN (
  OLD.status <> 'running' AND (
    OLD.status, OLD.reason, OLD.error, OLD.ended_at, OLD.job_result_state, OLD.job_scorecard
  ) IS DISTINCT FROM (
    NEW.status, NEW.reason, NEW.error, NEW.ended_at, NEW.job_result_state, NEW.job_scorecard
  )
)
EXECUTE FUNCTION spindel.refuse_row('terminal-fence');

CREATE TRIGGER runs_update_3_early BEFORE UPDATE ON spindel.runs FOR EACH ROW
WHEN (
  (NEW.status = 'running' AND (NEW.reason IS NOT NULL OR NEW.error IS NOT NULL OR NEW.ended_at IS NOT NULL))
  OR (NEW.ended_at IS NULL AND (NEW.job_result_state IS NOT NULL OR NEW.job_scorecard IS NOT NULL))
)
EXECUTE FUNCTION spindel.refuse_row('outcome-early');

CREATE TRIGGER runs_delete BEFORE DELETE ON spindel.runs FOR EACH ROW
EXECUTE FUNCTION spindel.refuse_row('rows-are-kept');

CREATE TRIGGER runs_truncate BEFORE TRUNCATE ON spindel.runs FOR EACH STATEMENT
EXECUTE FUNCTION spindel.refuse_row('rows-are-kept');

CREATE FUNCTION spindel.run_causes_insert() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  consumer record;
  cause record;
BEGIN
  SELECT room, status INTO consumer FROM spindel.runs WHERE id = NEW.run_id FOR SHARE;
  -- An ended cause stays ended, so it needs no lock.
  SELECT room, ended_at INTO cause FROM spindel.runs WHERE id = NEW.cause_id;
  IF (NEW.run_id <> NEW.cause_id AND consumer.status = 'running'
    AND cause.room = consumer.room AND cause.ended_at IS NOT NULL) IS NOT TRUE
  THEN
    PERFORM spindel.refuse('cause');
  END IF;
  RETURN NEW;
END;
$$;

CREATE TRIGGER run_causes_insert BEFORE INSERT ON spindel.run_causes FOR EACH ROW
EXECUTE FUNCTION spindel.run_causes_insert();

CREATE TRIGGER run_causes_change BEFORE UPDATE OR DELETE ON spindel.run_causes FOR EACH ROW
EXECUTE FUNCTION spindel.refuse_row('rows-are-kept');

CREATE TRIGGER run_causes_truncate BEFORE TRUNCATE ON spindel.run_causes FOR EACH STATEMENT
EXECUTE FUNCTION spindel.refuse_row('rows-are-kept');
