// Shows a stream and how long its calls take, and sends what the user sets. The server is in server.py.

const SPAN = 10;  // seconds of the plots
const PATHS = ["burst", "plain RPC"];
const SWITCHES = ["pause", "record"];  // buttons that stay down
const CALM = matchMedia("(prefers-reduced-motion: reduce)");  // then everything is drawn once a second
const $ = (id) => document.getElementById(id);
const make = (tag, facts = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), facts);
  node.append(...children);
  return node;
};

const points = [];  // of the last ten seconds
let hello, words, show, socket;

// ---- the server

function connect() {
  socket = new WebSocket(new URL("stream", location.href.replace(/^http/, "ws")));
  socket.binaryType = "blob";
  let last = Promise.resolve();  // messages are taken one after the other, pictures included
  socket.onmessage = ({data}) => { last = last.then(() => take(data)).catch((error) => console.error(error)); };
  socket.onclose = () => {
    status("no connection", "failed");
    setTimeout(connect, 1000);
  };
}

const send = (message) => socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify(message));

async function take(data) {
  if (typeof data !== "string") return drawn(await createImageBitmap(data));
  const message = JSON.parse(data);
  if (message.type === "hello") greet(message);
  else if (message.type === "state") state(message);
  else if (message.type === "refused") refuse(message.text);
  else {
    words = message;
    points.push(...message.points);
    while (points.length && points[0].t < points.at(-1).t - SPAN) points.shift();
    if (!message.has_picture) await drawn(null);
  }
}

// An update is drawn when the browser draws, and then the server is told, which sends the next one. No user looks at a
// hidden page, whose browser draws nothing: there it takes a second, as it does for those who like it calm.
function drawn(bitmap) {
  const slow = CALM.matches || document.hidden;
  return new Promise((done) => (slow ? setTimeout(done, 1000) : requestAnimationFrame(done))).then(() => {
    show.draw(words, bitmap);
    bitmap?.close();
    facts();
    send({drawn: true});
  });
}

// ---- words

function status(text, kind = text) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").dataset.status = kind;
}

function notice(text) {
  if ($("notice").textContent !== text) $("notice").textContent = text;
}

function refuse(text) {
  notice(`Refused: ${text}`);
  for (const field of document.querySelectorAll("#controls [name]")) field.value = field.dataset.value;
}

function state({status: text, place, values, deaths, notice: said, recording}) {
  status(text);
  if (said) notice(said);
  else if (!$("notice").textContent.startsWith("Refused")) notice("");
  $("deaths").textContent = deaths;
  if (place) {
    $("place").textContent = `all ${place.operations} operations on ${place.device} ${place.version} (${place.type}), ` +
      `engine process ${place.engine}`;
  }
  for (const [name, value] of Object.entries(values)) {
    const field = document.querySelector(`#controls [name="${name}"]`);
    if (!field) continue;
    field.dataset.value = value;
    if (field !== document.activeElement || field.tagName === "SELECT") field.value = value;
  }
  for (const name of SWITCHES) $(name).setAttribute("aria-pressed", values[name]);
  $("recording").textContent = recording ? `Recording to ${recording}` : "";
}

function facts() {
  $("fps").textContent = words.fps.toFixed(0);
  const {costs} = points.at(-1) ?? {};
  $("costs").textContent = costs === undefined ? "–" : `${costs.toPrecision(3)} ms a call`;
  $("dropped").textContent = words.dropped;
  $("dropped-here").textContent = words.dropped_here;
  $("camera-figures").hidden = !words.camera;
  $("camera").textContent = words.camera ?? "";
}

// ---- controls

function greet(message) {
  const isFirst = !hello;
  hello = message;
  points.length = 0;
  if (!isFirst) return;
  document.title = `Burst, live: ${hello.kind}`;
  $("source").textContent = hello.source;
  $("controls").append(...hello.settings.filter(({name}) => !SWITCHES.includes(name)).map(control));
  show = hello.kind === "camera" ? new Camera() : new Sound();
}

function control({name, label, help, choices, limits, unit}) {
  const text = unit ? `${label}, ${unit}` : label;
  const field = choices.length
    ? make("select", {name, id: `set-${name}`}, ...choices.map((choice) => make("option", {value: choice}, choice)))
    : make("input", {name, id: `set-${name}`, type: "number", min: limits[0], max: limits[1], step: "any"});
  const hint = limits ? [help, `${limits[0]} to ${limits[1]}`].filter(Boolean).join("; ") : help;
  field.addEventListener("change", () => {
    notice("");
    const value = limits ? field.valueAsNumber : field.value;
    send({set: {[name]: value}});
  });
  field.setAttribute("aria-describedby", `${name}-hint`);
  const row = make("div", {}, make("label", {htmlFor: field.id}, text), make("small", {id: `${name}-hint`}, hint), field);
  row.className = "row";
  return row;
}

for (const name of SWITCHES) {
  $(name).addEventListener("click", () => send({set: {[name]: $(name).getAttribute("aria-pressed") !== "true"}}));
}
$("controls").addEventListener("submit", (event) => event.preventDefault());

// ---- what is drawn

// A canvas whose pixels are those of the screen; the sizes are CSS pixels.
function sheet(canvas) {
  const {width, height} = canvas.getBoundingClientRect(), ratio = devicePixelRatio || 1;
  const size = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return {pen, width, height};
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

class Camera {
  #said = 0;

  draw({found, size, said}, bitmap) {
    const canvas = $("picture");
    canvas.style.aspectRatio = `${size[0]} / ${size[1]}`;
    const {pen, width, height} = sheet(canvas), scale = width / size[0];
    pen.drawImage(bitmap, 0, 0, width, height);
    pen.font = "600 13px system-ui, sans-serif";
    pen.textBaseline = "bottom";
    for (const [name, x0, y0, x1, y1, score] of found) {
      const edges = [x0 * scale, y0 * scale, (x1 - x0) * scale, (y1 - y0) * scale];
      for (const [ink, wide] of [["#181818", 4], [hello.colours[name], 2]]) {
        pen.strokeStyle = ink;
        pen.lineWidth = wide;
        pen.strokeRect(...edges);
      }
      const label = `${name} ${Math.round(100 * score)}%`, top = Math.max(edges[1], 18);
      pen.fillStyle = hello.colours[name];
      pen.fillRect(edges[0], top - 18, pen.measureText(label).width + 8, 18);
      pen.fillStyle = "#181818";
      pen.fillText(label, edges[0] + 4, top - 2);
    }
    this.#tell(found, said);
  }

  // Once in two seconds, for those who hear it.
  #tell(found, said) {
    if (performance.now() - this.#said < 2000) return;
    this.#said = performance.now();
    const counts = Object.groupBy(found, ([name]) => name);
    const told = said?.join("; ") ?? (Object.entries(counts).map(([name, all]) => `${all.length} ${name}`).join(", ") || "nothing");
    $("results").textContent = said ? told : `Found: ${told}`;
    $("picture").setAttribute("aria-label", `the stream, with ${told} in it`);
  }
}

class Sound {
  #told = -1;  // the time of the newest point whose keys are in the text

  constructor() {
    $("picture").style.aspectRatio = "5 / 2";
    $("stage-title").textContent = "The sound, and its spectrum over 10 s";
    $("dropped-name").textContent = "blocks read late";
    $("keypad").hidden = false;
    $("keypad").append(...Array.from(hello.keys, (key) => make("span", {}, key)));
    $("results").textContent = "Heard:";
    $("results").after(make("small", {}, "5!: heard but not pressed; (5): pressed but not heard"));
  }

  draw({likely}) {
    const {pen, width, height} = sheet($("picture")), waves = height * .3;
    const last = points.at(-1).block, step = width * hello.block_ms / 1000 / SPAN;
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, width, height);
    for (const {block, low, high, tones} of points) {
      const x = width - step * (last - block + 1);
      pen.fillStyle = "#9fd3f5";
      pen.fillRect(x, waves * (.5 - high * .9), step + .5, Math.max(1, waves * .9 * (high - low)));
      pen.drawImage(column(tones), x, waves, step + .5, height - waves);
    }
    likely.forEach((share, n) => { $("keypad").children[n].toggleAttribute("data-on", share > .5); });
    this.#tell();
  }

  #tell() {
    const news = points.filter(({t}) => t > this.#told).flatMap(({heard}) => heard);
    this.#told = points.at(-1).t;
    for (const {key, pressed, verdict} of news) {
      const sign = verdict === "missed" ? `(${pressed})` : verdict === "wrong" ? `${key}!` : key;
      $("results").append(make("span", {}, ` ${sign}`));  // a node each, so that only the new ones are read out
    }
    while ($("results").children.length > 24) $("results").firstElementChild.remove();
  }
}

const columns = new Map();  // of the spectrogram, by what is in them

function column(tones) {
  if (columns.has(tones)) return columns.get(tones);
  if (columns.size > 700) columns.delete(columns.keys().next().value);
  const bytes = Uint8Array.from(atob(tones), (letter) => letter.charCodeAt(0)).reverse();
  const canvas = new OffscreenCanvas(1, bytes.length), pen = canvas.getContext("2d");
  const pixels = pen.createImageData(1, bytes.length);
  bytes.forEach((loud, n) => {
    const share = loud / 255;  // from black over purple and orange to pale yellow
    const blue = .6 * Math.sin(Math.PI * Math.min(1, 1.15 * share));
    pixels.data.set([Math.min(1, 1.7 * share), share ** 2.2, blue, 1].map((part) => 255 * part), 4 * n);
  });
  pen.putImageData(pixels, 0, 0);
  columns.set(tones, canvas);
  return canvas;
}

// ---- plots

// The part of a call that a plot is about, in ms; undefined if it was not measured.
const PARTS = {
  whole: ([whole]) => whole,
  around: ([whole, device]) => (device === null ? undefined : Math.max(whole - device, .001)),
};

function plot(id) {
  const data = PATHS.map((path) => points
    .filter(({calls}) => calls[path])
    .map(({t, calls}) => [t, PARTS[id](calls[path])])
    .filter(([, value]) => value !== undefined));
  const {pen, width, height} = sheet(document.querySelector(`#${id} canvas`));
  pen.clearRect(0, 0, width, height);
  const values = data.flat().map(([, value]) => value);
  if (!values.length) return;
  const [low, high] = reach(values), last = points.at(-1).t, left = 44, bottom = 18;
  const x = (t) => left + (width - left - 6) * (1 - (last - t) / SPAN);
  const y = (value) => 6 + (height - bottom - 12) * (1 - Math.log(value / low) / Math.log(high / low));
  grid(pen, {low, high, last, x, y, width, height});
  data.forEach((path, n) => {
    pen.fillStyle = colour(n ? "--plain" : "--burst");
    pen.beginPath();
    for (const [t, value] of path) {
      if (n) pen.rect(x(t) - 1.5, y(value) - 1.5, 3, 3);
      else { pen.moveTo(x(t), y(value)); pen.arc(x(t), y(value), 2, 0, 7); }
    }
    pen.fill();
  });
  const rows = data.map((path, n) => [PATHS[n], path.length, ...percentiles(path.map(([, value]) => value))]);
  tabulate(document.querySelector(`#${id} table`), rows);
  data.forEach((path, n) => line(pen, colour(n ? "--plain" : "--burst"), y, rows[n], left, width));
}

// Where the axis begins and ends: 1, 2 or 5 times a power of ten.
function reach(values) {
  const steps = [];
  for (let decade = .001; decade < 1e5; decade *= 10) steps.push(decade, 2 * decade, 5 * decade);
  const least = Math.min(...values), most = Math.max(...values);
  return [steps.findLast((step) => step <= least) ?? .001, steps.find((step) => step > most) ?? 1e5];
}

function grid(pen, {low, high, last, x, y, width, height}) {
  pen.font = "12px system-ui, sans-serif";
  pen.fillStyle = colour("--faint");
  pen.strokeStyle = colour("--line");
  pen.lineWidth = 1;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (let decade = .001; decade < 1e5; decade *= 10) {
    for (const n of [1, 2, 5]) {
      const step = n * decade;
      if (step < low * .999 || step > high * 1.001) continue;
      pen.beginPath();
      pen.moveTo(44, Math.round(y(step)) + .5);
      pen.lineTo(width - 6, Math.round(y(step)) + .5);
      pen.stroke();
      if (n === 1 || high / low < 150) pen.fillText(Number(step.toPrecision(1)), 38, y(step));
    }
  }
  pen.textAlign = "center";
  for (let ago = 0; ago <= SPAN; ago += 2) {
    pen.fillText(ago ? `-${ago} s` : "now", Math.min(Math.max(x(last - ago), 56), width - 18), height - 7);
  }
}

function line(pen, ink, y, [, count, p50, p99], left, width) {
  if (!count) return;
  pen.strokeStyle = ink;
  for (const [value, dashes] of [[p50, []], [p99, [6, 4]]]) {
    pen.setLineDash(dashes);
    pen.beginPath();
    pen.moveTo(left, y(value));
    pen.lineTo(width - 6, y(value));
    pen.stroke();
  }
  pen.setLineDash([]);
}

// The smallest values that 50 and 99 % do not exceed.
function percentiles(values) {
  if (!values.length) return [undefined, undefined];
  const sorted = values.toSorted((a, b) => a - b);
  return [.5, .99].map((share) => sorted[Math.ceil(share * sorted.length) - 1]);
}

function tabulate(table, rows) {
  if (!table.rows.length) {
    const heads = ["path", "calls", "p50 ms", "p99 ms"].map((text) => make("th", {scope: "col"}, text));
    table.append(make("thead", {}, make("tr", {}, ...heads)));
    table.append(make("tbody", {}, ...PATHS.map((path) => {
      const row = make("tr", {}, make("th", {scope: "row"}, path), make("td"), make("td"), make("td"));
      row.dataset.path = path;
      return row;
    })));
  }
  rows.forEach(([, count, ...times], n) => {
    const cells = table.tBodies[0].rows[n].cells;
    cells[1].textContent = count;
    times.forEach((time, i) => { cells[2 + i].textContent = time === undefined ? "–" : time.toPrecision(3); });
  });
}

let plotted = 0;
function animate(now) {
  if (now - plotted > (CALM.matches ? 1000 : 100) && points.length) {
    plotted = now;
    plot("whole");
    plot("around");
  }
  requestAnimationFrame(animate);
}

requestAnimationFrame(animate);
connect();
