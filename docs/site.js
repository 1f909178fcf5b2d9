// A button at each block of code copies it; of a console, the commands alone.
for (const block of document.querySelectorAll("div.highlight")) {
  const button = document.createElement("button");
  button.className = "copy";
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const lines = block.querySelector("pre").innerText.trimEnd().split("\n");
    const commands = lines.filter((line) => line.startsWith("$ ")).map((line) => line.slice(2));
    await navigator.clipboard.writeText((commands.length ? commands : lines).join("\n"));
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  block.append(button);
}
