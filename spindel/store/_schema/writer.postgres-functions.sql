-- What the writer of a session calls: a batch of mutations is one statement, whatever it holds.
--
-- The functions live in the session's own schema and are made by whoever connects, so that they are always those of the
-- version that calls them: a newer program may share the database with an older one. What must hold for everybody is
-- in the tables' triggers instead.
--
-- A call is [function, room, epoch, argument]. No epoch: it needs no ownership. The function `together` has calls as its
-- argument. A verdict says whether something changed, and either a value or the code of a refusal, which left nothing.

CREATE TYPE pg_temp.verdict AS (changed boolean, value jsonb, code text, detail text);

CREATE FUNCTION pg_temp.changed(value jsonb DEFAULT NULL) RETURNS pg_temp.verdict LANGUAGE sql IMMUTABLE AS $$
  SELECT (true, value, NULL, NULL)::pg_temp.verdict;
$$;

CREATE FUNCTION pg_temp.unchanged(value jsonb DEFAULT NULL) RETURNS pg_temp.verdict LANGUAGE sql IMMUTABLE AS $$
  SELECT (false, value, NULL, NULL)::pg_temp.verdict;
$$;

CREATE FUNCTION pg_temp.refused(code text, detail text) RETURNS pg_temp.verdict LANGUAGE sql IMMUTABLE AS $$
  SELECT (false, NULL, code, detail)::pg_temp.verdict;
$$;

CREATE FUNCTION pg_temp.apply_one(call jsonb) RETURNS pg_temp.verdict LANGUAGE plpgsql AS $$
DECLARE
  each jsonb;
  verdict pg_temp.verdict;
  some_changed boolean := false;
  results jsonb := '[]';
BEGIN
  IF call->>2 IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM spindel.rooms WHERE name = call->>1 AND epoch = (call->>2)::bigint)
  THEN
    RETURN pg_temp.refused('not-owner', format('epoch %s doesn''t own room ''%s''', call->>2, call->>1));
  END IF;
  IF call->>0 <> 'together' THEN
    RETURN pg_temp.dispatch(call->>0, call->3);
  END IF;
  FOR each IN SELECT * FROM jsonb_array_elements(call->3) LOOP
    verdict := pg_temp.apply_one(each);
    IF verdict.code IS NOT NULL THEN
      -- Takes back what was done for those before it.
      RAISE EXCEPTION USING ERRCODE = 'SPNDL', CONSTRAINT = verdict.code, DETAIL = coalesce(verdict.detail, '');
    END IF;
    some_changed := some_changed OR verdict.changed;
    results := results || jsonb_build_array(verdict.value);
  END LOOP;
  RETURN (some_changed, results, NULL, NULL)::pg_temp.verdict;
END;
$$;

-- One by one, each in a savepoint of its own, so that one that is refused takes nothing of its neighbours along. What
-- isn't about the mutation itself, such as a full disk or a deadlock, ends the whole batch.
CREATE FUNCTION pg_temp.apply_each(calls jsonb) RETURNS pg_temp.verdict[] LANGUAGE plpgsql AS $$
DECLARE
  call jsonb;
  verdicts pg_temp.verdict[] := '{}';
  state text;
  code text;
  message text;
  detail text;
BEGIN
  FOR call IN SELECT * FROM jsonb_array_elements(calls) LOOP
    BEGIN
      verdicts := verdicts || pg_temp.apply_one(call);
    EXCEPTION WHEN OTHERS THEN
      GET STACKED DIAGNOSTICS
        state = RETURNED_SQLSTATE, code = CONSTRAINT_NAME, message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL;
      IF left(state, 2) IN ('08', '25', '40', '53', '54', '55', '57', '58', 'F0', 'XX') THEN
        RAISE;
      ELSIF state = 'SPNDL' THEN
        verdicts := verdicts || pg_temp.refused(code, nullif(detail, ''));
      ELSE
        -- A constraint, or a function that broke down; the mark tells it from a code of ours.
        verdicts := verdicts || pg_temp.refused('!' || state, message);
      END IF;
    END;
  END LOOP;
  RETURN verdicts;
END;
$$;

-- The rooms are locked first, in the order of their names, so that no two batches wait for each other, and none for one
-- that claims: from here on nobody else changes these rooms, their epochs or their Runs.
--
-- Nearly always nothing is refused by a trigger. So all are applied in one savepoint first; savepoints for each would
-- use up a transaction number each, and make every other session look them up.
CREATE FUNCTION pg_temp.apply(calls jsonb) RETURNS SETOF pg_temp.verdict LANGUAGE plpgsql AS $$
DECLARE
  call jsonb;
  verdicts pg_temp.verdict[] := '{}';
BEGIN
  PERFORM 1 FROM spindel.rooms
    WHERE name IN (SELECT each->>1 FROM jsonb_array_elements(calls) AS each)
    ORDER BY name FOR NO KEY UPDATE;
  BEGIN
    FOR call IN SELECT * FROM jsonb_array_elements(calls) LOOP
      verdicts := verdicts || pg_temp.apply_one(call);
    END LOOP;
  EXCEPTION WHEN OTHERS THEN
    verdicts := pg_temp.apply_each(calls);
  END;
  -- A hint for readers in other processes, one a room: it goes out with the commit, or not at all.
  IF EXISTS (SELECT 1 FROM unnest(verdicts) AS verdict WHERE verdict.changed) THEN
    PERFORM pg_notify('spindel', room)
      FROM (SELECT DISTINCT each->>1 AS room FROM jsonb_array_elements(calls) AS each) AS rooms;
  END IF;
  RETURN QUERY SELECT * FROM unnest(verdicts);
END;
$$;

CREATE FUNCTION pg_temp.confirm_one(call jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  each jsonb;
  found text;
  answer text := 'present';
BEGIN
  IF call->>0 <> 'together' THEN
    EXECUTE format('SELECT pg_temp.%I($1)', call->>0) INTO found USING call->3;
    RETURN found;
  END IF;
  FOR each IN SELECT * FROM jsonb_array_elements(call->3) LOOP
    found := pg_temp.confirm_one(each);
    IF found = 'conflict' OR (found = 'absent' AND answer = 'present') THEN
      answer := found;
    END IF;
  END LOOP;
  RETURN answer;
END;
$$;

-- The lock waits for a transaction that was cut off and that the server still has.
CREATE FUNCTION pg_temp.confirm(call jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  PERFORM 1 FROM spindel.rooms WHERE name = call->>1 FOR SHARE;
  RETURN pg_temp.confirm_one(call);
END;
$$;
