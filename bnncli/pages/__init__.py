"""Pages for people: one HTML file with all that it needs in it. Figures come from bnncli.figures, words from whoever writes the page."""
