// Options are found as they are written. In a query of the search "--top-k" would mean "without top-k", and a single
// letter would match every word that begins with it; the page about sampling also has the names top_k, top_p, min_p.
let timer
document.addEventListener("keyup", (event) => {
  const field = event.target
  if (!event.isTrusted || !field.matches?.("[data-md-component=search-query]")) return
  clearTimeout(timer)
  timer = setTimeout(() => {
    const query = field.value.replace(/(^|\s)-+(?=\w)/g, "$1").replace(/_(?=\w\w)/g, "-").replace(/-(\w)(?=\s|$)/g, "_$1")
    if (query === field.value) return
    field.value = query
    field.dispatchEvent(new Event("keyup", { bubbles: true }))
  }, 400)
}, true)
